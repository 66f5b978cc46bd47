#!/bin/sh
# Makes an authority, and a certificate for each service: certificates.sh FOLDER [NAME OF THIS MACHINE]
# For trials, and for machines without another authority. The certificates are valid for a year.
set -eu
mkdir -p "$1"
cd "$1"
host=${2:-localhost}
if ! [ -e ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 \
    -subj /CN=pagewire -keyout ca.key -out ca.crt
fi
for name in scheduler worker client prometheus; do
  mkdir -p "$name"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$name" \
    -keyout "$name/tls.key" -out "$name/tls.csr"
  printf 'subjectAltName=DNS:%s,DNS:localhost,DNS:%s,IP:127.0.0.1' "$name" "$host" > "$name/names"
  openssl x509 -req -in "$name/tls.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 \
    -extfile "$name/names" -out "$name/tls.crt"
  rm "$name/tls.csr" "$name/names"
  cp ca.crt "$name/ca.crt"
  chmod 644 "$name/tls.key"  # the containers' user reads the key; protect the folder from other users
done
chmod 700 .
