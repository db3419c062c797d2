"""The papers' claims, checked on one machine against the papers' own baselines."""
