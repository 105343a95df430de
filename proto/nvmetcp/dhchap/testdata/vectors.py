# SPDX-License-Identifier: Apache-2.0
"""Makes vectors.json without this package: Python's hmac, hashlib and pow, and OpenSSL's primes.

The specification has no vectors; section numbers are those of NVM Express Base 2.1.
"""
import base64, hashlib, hmac, json, subprocess, zlib

HASHES = {1: "sha256", 2: "sha384", 3: "sha512"}
GROUPS = {0: 0, 1: 2048, 2: 3072, 3: 4096, 4: 6144, 5: 8192}
HOST, SUBSYSTEM = "nqn.2014-08.org.nvmexpress:uuid:host", "nqn.2014-08.org.nvmexpress:uuid:subsystem"


def openssl_prime(bits):
    text = subprocess.run(
        ["openssl", "genpkey", "-genparam", "-algorithm", "DH", "-pkeyopt", f"group:ffdhe{bits}"],
        check=True, capture_output=True, text=True).stdout
    text = base64.b64decode("".join(text.splitlines()[1:-1]))  # between the lines of PEM
    i = 0

    def header():  # of one DER value: its length
        nonlocal i
        n = text[i + 1]
        i += 2
        if n & 0x80:
            k = n & 0x7F
            n = int.from_bytes(text[i:i + k], "big")
            i += k
        return n

    header()  # SEQUENCE
    n = header()  # INTEGER p
    return int.from_bytes(text[i:i + n], "big")


def stream(name, n):  # reproducible bytes
    out, i = b"", 0
    while len(out) < n:
        out += hashlib.sha256(f"{name} {i}".encode()).digest()
        i += 1
    return out[:n]


def representation(secret, h):  # 8.3.4.5.7
    return f"DHHC-1:{h:02d}:" + base64.b64encode(secret + zlib.crc32(secret).to_bytes(4, "little")).decode() + ":"


def transform(secret, h, nqn):
    return secret if h == 0 else hmac.new(secret, nqn.encode() + b"NVMe-over-Fabrics", HASHES[h]).digest()


def proof(key, h, challenge, session, seq, tid, role, a, b):  # 8.3.4.5.4
    if session is not None:
        challenge = hmac.new(hashlib.new(HASHES[h], session).digest(), challenge, HASHES[h]).digest()
    data = challenge + seq.to_bytes(4, "little") + tid.to_bytes(2, "little") + b"\0" + role + a.encode() + b"\0" + b.encode()
    return hmac.new(key, data, HASHES[h]).digest()


primes = {g: openssl_prime(bits) for g, bits in GROUPS.items() if bits}
cases = []
for h, name in HASHES.items():
    for g, bits in GROUPS.items():
        for kh in (0, h):
            label = f"{h} {g} {kh}"
            size = hashlib.new(name).digest_size
            hk, ck = stream("hk" + label, size), stream("ck" + label, size)
            c1, c2 = stream("c1" + label, size), stream("c2" + label, size)
            s1, s2, tid = 0xfffefdfc - g, 0x01020304 + h, 0xa1b0 + g
            case = dict(hash=h, group=g, host_nqn=HOST, subsystem_nqn=SUBSYSTEM, transaction=tid,
                        host_key=representation(hk, kh), controller_key=representation(ck, kh),
                        c1=c1.hex(), c2=c2.hex(), s1=s1, s2=s2)
            session = None
            if bits:
                p = primes[g]
                x, y = stream("x" + label, 40), stream("y" + label, 40)
                peer = pow(2, int.from_bytes(y, "big"), p)
                session = pow(peer, int.from_bytes(x, "big"), p).to_bytes(bits // 8, "big")
                case.update(private=x.hex(), peer=peer.to_bytes(bits // 8, "big").hex())
            case["host_proof"] = proof(transform(hk, kh, HOST), h, c1, session, s1, tid, b"HostHost", HOST, SUBSYSTEM).hex()
            case["controller_proof"] = proof(transform(ck, kh, SUBSYSTEM), h, c2, session, s2, tid, b"Controller", SUBSYSTEM, HOST).hex()
            cases.append(case)
digests = {str(g): hashlib.sha256(p.to_bytes(GROUPS[g] // 8, "big")).hexdigest() for g, p in primes.items()}
with open("vectors.json", "w") as f:
    json.dump(dict(primes_sha256=digests, cases=cases), f, indent=1)
    f.write("\n")
