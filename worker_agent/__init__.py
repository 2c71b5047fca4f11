"""The agent inside every rank."""
