"""Games of other packages. Their packages are imported only when a game is made."""
