"""`viiwork bench`: what a link is worth to the nodes at its ends."""
