"""Files: at URLs, of weights, from untrusted sources; guarded from other users, and temporary."""
