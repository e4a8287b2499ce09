"""The algorithm: particles, one worker's round, the server's round, verification, selection and aggregation."""
