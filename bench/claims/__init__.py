"""Claims of the papers behind gradpilot, made again with gradpilot's own code."""
