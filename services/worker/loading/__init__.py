"""Reads checkpoints: headers first, then the part of each tensor that this rank keeps."""
