# The coordinator's image: messages, rules and gRPC, without torch.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY dtckpt ./dtckpt
COPY server ./server
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && pip wheel --no-cache-dir --wheel-dir /wheels -c constraints.txt click grpcio grpcio-health-checking protobuf

FROM python:3.11.13-slim-bookworm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl && rm -r /wheels
USER 65532:65532
EXPOSE 50051
ENTRYPOINT ["dtckpt-coordinator", "serve"]
CMD ["--host", "0.0.0.0", "--port", "50051"]
