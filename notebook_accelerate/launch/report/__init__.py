"""A run as static HTML, text and SVG."""
