"""How payloads cross ranks. One file per pattern; each says how many bytes a rank sends."""
