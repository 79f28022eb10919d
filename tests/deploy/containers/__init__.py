"""Own the building, inspection and running of images in pods, with buildah and podman, below build/containers."""
