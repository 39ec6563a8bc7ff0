"""Messages between processes of a job, and their encoding."""
