"""Access to files: remote ones, weights, files from untrusted sources or other users, and temporary files."""
