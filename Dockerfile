# The control plane: web, control and ingest run from this one image. Nodes are installed on their machines, without it.
FROM node:24-slim AS assets
WORKDIR /build
COPY package.json package-lock.json ./
RUN npm ci --no-audit --no-fund --ignore-scripts
COPY static ./static
RUN npm run --silent vendor

FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --create-home --uid 10001 gpuyard && install -d -o gpuyard /var/lib/gpuyard
WORKDIR /app
COPY requirements/portal.txt requirements/portal.txt
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements/portal.txt
COPY manage.py ./
COPY wire wire
COPY portal portal
COPY templates templates
COPY static static
COPY --from=assets /build/node_modules/.gpuyard-vendor node_modules/.gpuyard-vendor
USER gpuyard
