"""The controller: a daemon that decides for many runs."""
