"""Elastic training with Keras models, for every Keras; `hvdc.elastic` names what is public."""
