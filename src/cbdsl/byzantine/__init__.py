"""Workers that lie: what they do, and what they may know."""
