"""The options of a deployment: what may be asked, what excludes what, what is honoured here."""
