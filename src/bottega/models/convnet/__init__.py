"""A residual convolutional network over one to three axes, for classifiers of media."""
