"""Keras: the distributed optimizer and the callbacks, for Keras 3, tf_keras and tf.keras of TF 2.15."""
