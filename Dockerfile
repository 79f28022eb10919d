# The daemon, on Python's slim image. The library goes into the inference container by pip.
#
#   docker build -t kvlease:0.1.0 .
#   docker build -t kvlease:0.1.0-cuda --build-arg FLAVOUR=cuda .
#   docker build --target sbom --output build/sbom .
#   docker build --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:... .     # what was checked, and nothing newer
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG FLAVOUR=cpu

# What builds wheels stays out of what runs.
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY requirements/build.lock requirements/build.lock
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY service service
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# What runs, each package with the hash that it was locked with. `cuda` is for pools on GPUs (KVLEASED_DEVICE=cuda:0); the driver
# comes from the node's container runtime.
FROM ${PYTHON_IMAGE} AS packages
ARG FLAVOUR
WORKDIR /src
COPY requirements/service.lock requirements/cpu.lock
COPY requirements/cuda.lock requirements/cuda.lock
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/kvlease && /opt/kvlease/bin/pip install --require-hashes -r "requirements/${FLAVOUR}.lock"
COPY --from=build /wheels /wheels
RUN /opt/kvlease/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl \
    && /opt/kvlease/bin/pip check \
    && /opt/kvlease/bin/pip uninstall --yes setuptools pip

# A list of all that runs, in CycloneDX's format.
FROM packages AS sbom-maker
WORKDIR /src
COPY requirements/sbom.lock requirements/sbom.lock
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/sbom && /opt/sbom/bin/pip install --require-hashes -r requirements/sbom.lock
RUN /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /kvlease.cdx.json /opt/kvlease/bin/python

FROM scratch AS sbom
COPY --from=sbom-maker /kvlease.cdx.json /

FROM ${PYTHON_IMAGE} AS daemon
ARG FLAVOUR
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="kvlease" \
      org.opencontainers.image.description="A per-node KV-cache daemon for LLM inference (${FLAVOUR})" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.licenses="Apache-2.0"
# The base's own installer is not needed to run: the daemon's packages are in an environment of their own.
RUN rm -rf /usr/local/bin/pip* /usr/local/bin/wheel /usr/local/lib/python3.*/ensurepip /usr/local/lib/python3.*/site-packages/* \
    && groupadd --gid 10001 kvlease \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvlease \
    && install -d -m 0700 -o 10001 -g 10001 /run/kvlease
COPY --from=packages /opt/kvlease /opt/kvlease
ENV PATH=/opt/kvlease/bin:$PATH \
    XDG_RUNTIME_DIR=/run/kvlease \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
# Only the directory of the sockets is written to: the root may be read-only. Sockets are in /run/kvlease/kvlease; REST and gRPC
# listen on the loopback address alone, which a pod shares.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 CMD ["kvleased", "probe", "livez"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvleased"]
CMD ["serve"]
