"""If, Loop and sequences: resolved where shapes or the profile decide them."""
