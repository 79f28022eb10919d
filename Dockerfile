# The daemon, on CPU memory. The library goes into the inference container by pip.
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/kvlease && /opt/kvlease/bin/pip install --no-cache-dir ".[service]"

FROM python:3.11-slim
COPY --from=build /opt/kvlease /opt/kvlease
ENV PATH=/opt/kvlease/bin:$PATH XDG_RUNTIME_DIR=/run/user/10001 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home kvlease && install -d -m 0700 -o kvlease -g kvlease /run/user/10001
USER 10001
# Sockets are in $XDG_RUNTIME_DIR/kvlease; REST and gRPC listen on the loopback address alone, which a pod shares.
ENTRYPOINT ["kvleased"]
CMD ["serve"]
