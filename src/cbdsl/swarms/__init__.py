"""Who answers a server: the workers in this process."""
