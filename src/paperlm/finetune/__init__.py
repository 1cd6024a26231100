"""Training beyond pre-training with trl: what fine-tuning, reward models and policy optimization share."""
