"""Own one way in which configs say layers in each module; the registry says which architecture uses which."""
