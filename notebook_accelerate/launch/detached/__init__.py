"""Find and control the processes of detached runs."""
