"""The receiving process of the limits in kv_limits.py: started by them, gone when they are."""

import random
import socket
import sys
import threading

import torch
from torch._C._distributed_c10d import TCPStore

from baton.bench.kv_limits import CONTIGUOUS, HOST, TIMEOUT_S, receive_by_gloo
from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.pair import join_gloo


def receive_by_sockets(port: int, num_streams: int, share: int) -> None:
    streams = [
        threading.Thread(target=_receive, args=(socket.create_connection((HOST, port), TIMEOUT_S), share))
        for _ in range(num_streams)
    ]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()


def _receive(sock: socket.socket, share: int) -> None:
    buffer = memoryview(huge_zeros((share,), torch.uint8).fill_(1).numpy().data)
    sock.settimeout(None)
    with sock:
        while True:
            num_received = 0
            while num_received < share:
                received = sock.recv_into(buffer[num_received:], 0, socket.MSG_WAITALL)
                if not received:
                    return
                num_received += received
            sock.send(b"\0")


def receive_by_group(port: int, kind: str, page_bytes: int, num_pool_pages: int, num_pages: int) -> None:
    group = join_gloo(TCPStore(HOST, port, is_master=False), 1, HOST, TIMEOUT_S)
    if kind == CONTIGUOUS:
        messages = [torch.zeros(num_pages * page_bytes, dtype=torch.uint8)]
    else:
        pool = torch.zeros((num_pool_pages, page_bytes), dtype=torch.uint8)
        pages = random.Random(1).sample(range(num_pool_pages), num_pages)
        messages = [pool[page] for page in pages]
    receive_by_gloo(group, messages)


def main() -> None:
    kind, *arguments = sys.argv[1:]
    if kind == "socket":
        receive_by_sockets(*map(int, arguments))
    else:
        receive_by_group(int(arguments[0]), arguments[1], *map(int, arguments[2:]))


if __name__ == "__main__":
    main()
