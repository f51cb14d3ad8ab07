# To be read by other scripts: pip's own settings, for uv.

lend_pip_settings() {  # uv reads its own configuration; where that names no index, pip's is used
  pip_setting() { .venv/bin/python -m pip config get "$1" 2>/dev/null || true; }
  index=${PIP_INDEX_URL:-$(pip_setting global.index-url)}
  extra=${PIP_EXTRA_INDEX_URL:-$(pip_setting global.extra-index-url)}
  links=${PIP_FIND_LINKS:-$(pip_setting global.find-links)}
  cert=${PIP_CERT:-$(pip_setting global.cert)}
  if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}${UV_CONFIG_FILE:-}" ]; then export UV_DEFAULT_INDEX="$index"; fi
  if [ -n "$extra" ] && [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}" ]; then export UV_INDEX="$extra"; fi
  if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then UV_FIND_LINKS=$(printf '%s' "$links" | tr -s ' \n' ','); export UV_FIND_LINKS; fi
  if [ -n "$cert" ] && [ -z "${SSL_CERT_FILE:-}" ]; then export SSL_CERT_FILE="$cert"; fi
}
