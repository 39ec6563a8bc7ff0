"""RankTable -> JSON text."""

import json
from collections.abc import Mapping

from ranktable.model import Extra, RankTable, Server, SuperPod, TableDevice


def render_table(table: RankTable) -> str:
    """Return the file's text: ASCII, indented by 4, ending in a newline.

    Equal tables give equal bytes.  Fields stand in the order MindSpore's
    hccl_tools writes them and unknown ones after the known; every number is a
    string, since MindSpore's scheduler ignores a table with an integer `rank_id`.
    """
    pods = [_super_pod(pod) for pod in table.super_pod_list]
    fields: dict[str, object] = {
        "version": table.version.value,
        "server_count": len(table.server_list),
        "server_list": [_server(server) for server in table.server_list],
        "super_pod_list": pods or None,
        "status": table.status.value,
    }
    return json.dumps(_object(fields, table.extra), indent=4) + "\n"


def _server(server: Server) -> dict[str, object]:
    fields: dict[str, object] = {
        "server_id": server.server_id,
        "host_ip": server.host_ip,
        "server_ip": server.server_ip,
        "container_ip": server.container_ip,
        "pod_ip": server.pod_ip,
        "hardware_type": server.hardware_type,
        "device": [_device(device) for device in server.device],
        "host_nic_ip": server.host_nic_ip,
    }
    return _object(fields, server.extra)


def _device(device: TableDevice) -> dict[str, object]:
    fields: dict[str, object] = {
        "device_id": device.device_id,
        "device_ip": device.device_ip,
        "super_device_id": device.super_device_id,
        "device_port": device.device_port,
        "backup_device_ip": device.backup_device_ip,
        "backup_device_port": device.backup_device_port,
        "host_port": device.host_port,
        "device_logical_id": device.device_logical_id,
        "rank_id": device.rank_id,
    }
    return _object(fields, device.extra)


def _super_pod(pod: SuperPod) -> dict[str, object]:
    fields: dict[str, object] = {
        "super_pod_id": pod.super_pod_id,
        "server_list": [{"server_id": server_id} for server_id in pod.server_list],
    }
    return _object(fields, pod.extra)


def _object(fields: Mapping[str, object], extra: Extra) -> dict[str, object]:
    known = {
        key: str(value) if isinstance(value, int) else value
        for key, value in fields.items()
        if value is not None
    }
    return known | {key: json.loads(text) for key, text in extra}
