"""The views of a run as static HTML, text and SVG."""
