"""Files that deploy a packaged Triton repository: Kubernetes objects, or a compose file for one machine.

spec = plan_deployment(repository, DeploymentOptions(image="registry.local/minilm:1"))
write_deployment(spec, repository, folder, "kubernetes")
"""

from trtforge.serving.deploy.folder import Form, WrittenDeployment, check_folder, write_deployment
from trtforge.serving.deploy.plan import DeploymentOptions, plan_deployment
from trtforge.serving.deploy.spec import DeploymentSpec, Ports, ResponseCache, Scaling

__all__ = [
    "DeploymentOptions",
    "DeploymentSpec",
    "Form",
    "Ports",
    "ResponseCache",
    "Scaling",
    "WrittenDeployment",
    "check_folder",
    "plan_deployment",
    "write_deployment",
]
