"""What artifacts are made by: sources of models, losses, gradients, updates."""
