"""What one worker does, in memory or on a device: it moves, trains, scores and remembers. Knows no server."""
