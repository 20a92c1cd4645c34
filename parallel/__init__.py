"""Meshes, placements and collectives: how a tree is spread over processes."""
