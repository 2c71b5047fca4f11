"""Policies and the models they decide with: numbers only, no torch, no grpc."""
