"""Own one way to say layers in each module; which architecture goes which way is the registry's."""
