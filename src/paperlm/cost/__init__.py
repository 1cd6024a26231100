"""What follows from shapes alone: memory of training, bytes and operations of the loss. Imports no tensor library."""
