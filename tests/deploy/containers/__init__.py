"""Own how an image is built, looked into and run in a pod here: by buildah and podman, below build/containers."""
