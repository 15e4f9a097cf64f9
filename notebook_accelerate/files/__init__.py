"""Access to files: at URLs, with weights, from untrusted sources, protected from other users, and temporary."""
