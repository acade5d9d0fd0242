"""What all folders use: names of variables, argument checks, error text, tracing helpers, host memory."""
