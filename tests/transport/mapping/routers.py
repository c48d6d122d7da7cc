"""Small routers that forward ports because they are asked to: NAT-PMP and UPnP, as real ones do.

    python -m tests.transport.mapping.routers nat-pmp|upnp HOST OUTSIDE

in a router's namespace: `HOST` is its address inside, and what it opens it opens with iptables."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SSDP = ("239.255.255.250", 1900)
IGD = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
WAN = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor>
</specVersion><device><deviceType>{IGD}</deviceType><friendlyName>router</friendlyName><UDN>uuid:1</UDN>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><UDN>uuid:2</UDN>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType>
<UDN>uuid:3</UDN><serviceList><service><serviceType>{WAN}</serviceType>
<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId><controlURL>/control</controlURL>
<eventSubURL>/event</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service></serviceList></device>
</deviceList></device></deviceList></device></root>"""


@dataclass
class Rules:
    """What is forwarded: by port outside, (host, port, seconds)."""

    outside: str
    """Its address there."""
    changed: Callable[[str, int, str, int], None] = lambda *_: None
    """`changed("A" or "D", outside, host, port)`: added, deleted."""
    ports: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    taken: dict[int, str] = field(default_factory=dict)
    """Ports outside that another machine has."""

    def add(self, outside: int, host: str, port: int, lease_s: int) -> None:
        if outside not in self.ports:
            self.changed("A", outside, host, port)
        self.ports[outside] = (host, port, lease_s)

    def delete(self, outside: int) -> None:
        host, port, _ = self.ports.pop(outside)
        self.changed("D", outside, host, port)


class NatPmpServer(asyncio.DatagramProtocol):
    """RFC 6886."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.result = 0
        self.lose = 0
        """Requests that are not heard."""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        if self.lose:
            self.lose -= 1
            return
        number = data[1]
        head = struct.pack(">BBHI", 0, number + 128, self.result, 1)
        if number == 0:
            self._transport.sendto(head + socket.inet_aton(self.rules.outside), sender)
            return
        _, inside, outside, lease_s = struct.unpack(">HHHI", data[2:12])
        mine = {o: r for o, r in self.rules.ports.items() if r[:2] == (sender[0], inside)}
        if not lease_s:
            for port in mine:
                self.rules.delete(port)
            outside = 0
        elif not self.result:
            outside = next(iter(mine), outside)
            while outside in self.rules.taken:
                outside += 1
            self.rules.add(outside, sender[0], inside, lease_s)
        self._transport.sendto(head + struct.pack(">HHI", inside, outside, lease_s), sender)


class Ssdp(asyncio.DatagramProtocol):
    """Says where the description is."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        if data.startswith(b"M-SEARCH") and IGD.encode() in data:
            answer = (
                f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nST: {IGD}\r\n"
                f"USN: uuid:1::{IGD}\r\nEXT:\r\nSERVER: test\r\nLOCATION: {self._location}\r\n\r\n"
            )
            self._transport.sendto(answer.encode(), sender)


class Igd:
    """The description, and the four actions that are of use here."""

    def __init__(self, rules: Rules, *, knows_leases: bool = True) -> None:
        self.rules = rules
        self._knows_leases = knows_leases

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"(?i)content-length: *(\d+)", head)
            body = (await reader.readexactly(int(length[1]))).decode() if length else ""
            code, text = 200, DESCRIPTION
            if head.startswith("POST"):
                action = re.search(r'(?i)soapaction:.*#(\w+)"', head)
                assert action is not None
                code, text = self._act(action[1], dict(re.findall(r"<(New\w+)>([^<]*)<", body)))
            answer = f"HTTP/1.1 {code} OK\r\nContent-Type: text/xml\r\nConnection: close\r\n"
            writer.write(f"{answer}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()

    def _act(self, action: str, values: dict[str, str]) -> tuple[int, str]:
        outside = int(values.get("NewExternalPort", 0))
        lease_s = int(values.get("NewLeaseDuration", 0))
        said = ""
        if action == "GetStatusInfo":
            said = "<NewConnectionStatus>Connected</NewConnectionStatus><NewUptime>9</NewUptime>"
        elif action == "GetExternalIPAddress":
            said = f"<NewExternalIPAddress>{self.rules.outside}</NewExternalIPAddress>"
        elif action == "AddPortMapping" and outside in self.rules.taken:
            return 500, _fault(718, "ConflictInMappingEntry")
        elif action == "AddPortMapping" and lease_s and not self._knows_leases:
            return 500, _fault(725, "OnlyPermanentLeasesSupported")
        elif action == "AddPortMapping":
            inside = int(values["NewInternalPort"])
            self.rules.add(outside, values["NewInternalClient"], inside, lease_s)
        elif action == "DeletePortMapping" and outside in self.rules.ports:
            self.rules.delete(outside)
        elif action == "DeletePortMapping":
            return 500, _fault(714, "NoSuchEntryInArray")
        return 200, _envelope(f'<u:{action}Response xmlns:u="{WAN}">{said}</u:{action}Response>')


def _envelope(inside: str) -> str:
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/">'
        f"<s:Body>{inside}</s:Body></s:Envelope>"
    )


def _fault(code: int, text: str) -> str:
    return _envelope(
        "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
        '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0">'
        f"<errorCode>{code}</errorCode><errorDescription>{text}</errorDescription>"
        "</UPnPError></detail></s:Fault>"
    )


async def serve_igd(igd: Igd, host: str) -> None:
    """On the interface with that address; until the loop ends."""
    server = await asyncio.start_server(igd.serve, host, 0)
    port = server.sockets[0].getsockname()[1]
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("", SSDP[1]))
    group = socket.inet_aton(SSDP[0]) + socket.inet_aton(host)
    listening.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    location = f"http://{host}:{port}/root.xml"
    await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Ssdp(location), sock=listening
    )


def with_iptables(how: str, outside: int, host: str, port: int) -> None:
    """`Rules.changed` of a router whose device outside is `wan`."""
    to = ("-p", "tcp", "--dport")
    told = ("-j", "DNAT", "--to-destination", f"{host}:{port}")
    for rule in (
        ("-t", "nat", f"-{how}", "PREROUTING", "-i", "wan", *to, str(outside), *told),
        (("-I" if how == "A" else "-D"), "FORWARD", "-i", "wan", *to, str(port), "-j", "ACCEPT"),
    ):
        subprocess.run(["iptables", *rule], check=True)
    print(how, outside, flush=True)


async def main(language: str, host: str, outside: str) -> None:
    rules = Rules(outside, with_iptables)
    if language == "upnp":
        await serve_igd(Igd(rules, knows_leases=False), host)
    else:
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: NatPmpServer(rules), local_addr=(host, 5351))
    print("serves", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
