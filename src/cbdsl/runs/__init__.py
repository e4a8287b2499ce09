"""One run: resolve a spec, build the experiment, play the rounds, write and resume its folder."""
