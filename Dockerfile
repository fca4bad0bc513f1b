# One image for the demo's two roles: `coordinator node` and `coordinator worker`. See docker-compose.yml.
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY coordinator ./coordinator
COPY lua ./lua
RUN pip install --no-cache-dir '.[cli]' && useradd --system --no-create-home coordinator

WORKDIR /
USER coordinator
ENV PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
ENTRYPOINT ["coordinator"]
CMD ["--help"]
