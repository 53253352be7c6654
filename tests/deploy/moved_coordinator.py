"""A coordinator that comes back at another address, as a pod does. Run where ``/etc/hosts`` is this process's own.

Prints for how many seconds a client did not reach it.
"""

import sys
import time
from pathlib import Path

import grpc

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination.grpc_calls import OPTIONS

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.coordinators import server_process

NAME = "coordinator.example"
GIVE_UP_S = 60.0


def name_is(address):
    Path("/etc/hosts").write_text(f"{address} {NAME}\n")


def reaches(stub):
    try:
        stub.ListJobs(pb.ListJobsRequest(), timeout=5)
    except grpc.RpcError:
        return False
    return True


def main():
    name_is("127.0.0.2")
    with server_process("--insecure", "--host=127.0.0.2") as server:
        stub = pb_grpc.CoordinatorStub(grpc.insecure_channel(f"{NAME}:{server.port}", options=OPTIONS))
        assert reaches(stub)
        server.kill()
        with server_process("--insecure", "--host=127.0.0.3", port=server.port):
            name_is("127.0.0.3")
            start = time.monotonic()
            while not reaches(stub):
                assert time.monotonic() - start < GIVE_UP_S
                time.sleep(0.05)
            print(time.monotonic() - start)


if __name__ == "__main__":
    main()
