"""Who may do what: bearer tokens of service accounts, and the rules of RBAC."""

from __future__ import annotations

import secrets

from kube.failures import ApiError
from kube.store import ObjectStore

GROUPS = ("system:serviceaccounts", "system:authenticated")


class AccessControl:
    """Decides on requests; without a token a client is the administrator.

    Attributes:
        refused: What was refused, in the words of the error.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._accounts: dict[str, tuple[str, str]] = {}
        self.refused: list[str] = []

    def token(self, namespace: str, name: str) -> str:
        """Return a new token of a service account."""
        token = secrets.token_urlsafe(16)
        self._accounts[token] = (namespace, name)
        return token

    def check(
        self, header: str | None, verb: str, *, group: str, resource: str, namespace, name
    ) -> None:
        """Raise `ApiError` unless the client may.

        Args:
            header: `Authorization` as the request has it.
            resource: Plural, with `/subresource` where one is meant.
        """
        if not header:
            return
        account = self._accounts.get(header.removeprefix("Bearer "))
        if account is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        rules = self._rules(account, namespace)
        if not any(_allows(rule, verb, group, resource, name) for rule in rules):
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            user = "system:serviceaccount:" + ":".join(account)
            text = (
                f'{resource} is forbidden: User "{user}" cannot {verb} resource "{resource}" '
                f'in API group "{group}"{where}'
            )
            self.refused.append(text)
            raise ApiError(403, "Forbidden", text)

    def _rules(self, account: tuple[str, str], namespace: str | None):
        bindings = [(b, "clusterroles", None) for b in self._store.list("clusterrolebindings")]
        if namespace:
            for binding in self._store.list("rolebindings", namespace):
                is_role = binding["roleRef"]["kind"] == "Role"
                kind = ("roles", namespace) if is_role else ("clusterroles", None)
                bindings.append((binding, *kind))
        for binding, kind, where in bindings:
            if any(_is(subject, account) for subject in binding.get("subjects", ())):
                role = self._store.find(kind, where, binding["roleRef"]["name"])
                yield from (role or {}).get("rules") or ()


def _is(subject: dict, account: tuple[str, str]) -> bool:
    if subject["kind"] == "Group":
        return subject["name"] in (*GROUPS, f"system:serviceaccounts:{account[0]}")
    return (subject.get("namespace"), subject["name"]) == account


def _allows(rule: dict, verb: str, group: str, resource: str, name: str | None) -> bool:
    def has(field: str, value: str) -> bool:
        return bool({value, "*"} & set(rule.get(field, ())))

    names = rule.get("resourceNames")
    is_named = not names or name in names
    return (
        has("verbs", verb) and has("apiGroups", group) and has("resources", resource) and is_named
    )
