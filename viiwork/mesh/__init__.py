"""Other machines: membership, discovery, capacity polls, peer conversations."""
