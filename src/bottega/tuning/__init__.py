"""Search for better values of recipe keys: spaces, studies, trials as child runs, population-based training."""
