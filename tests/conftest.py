"""Makes pytest put this folder on sys.path: tests import `introspect` and `specs` from it."""
