"""Random faults between the controller and the ranks, and whether the ranks stay together."""
