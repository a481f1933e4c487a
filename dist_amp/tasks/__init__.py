"""Example tasks: copy one to train a model of your own."""
