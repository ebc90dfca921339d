"""Vector environments over single instances, and the arrays that all vector environments write into."""
