"""Compressors, one file each: tensor code without I/O."""
