"""The distributed optimizer and the callbacks, for Keras 3, `tf_keras`, and `tf.keras` of TensorFlow 2.15."""
